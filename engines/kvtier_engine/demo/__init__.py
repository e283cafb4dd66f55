"""`kvtier demo`: one chat over several engines, a real daemon and a real model between them."""
