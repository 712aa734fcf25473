"""The tests: a folder for each room of the library, `contracts/` for what holds in all of them.

What a folder's tests share lies beside them; `grids.py` says which cases of a large grid run when.
"""
