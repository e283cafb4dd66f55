"""The local plane's directory: which pages lie where, in shared memory that clients read without
asking.
"""
