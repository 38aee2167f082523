"""Images with captions: every usual file format, one schema, and protocols that fix which images and how many."""
