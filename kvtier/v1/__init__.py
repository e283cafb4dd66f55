"""Generated from proto/ by `make proto`; never edited by hand (tests/test_generated.py compares)."""
