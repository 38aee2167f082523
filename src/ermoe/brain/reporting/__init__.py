"""The report of a run: a page, its pictures and tables, inside a BIDS derivative."""
