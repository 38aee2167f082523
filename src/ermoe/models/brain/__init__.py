"""ERMoE-ba: what turns a transformer over volumes into an estimator of brain age."""
