"""A nested batch as a small tree and a list of flat leaves.

conversion.py  nested batch <-> tree and leaves
trees.py       the tree, which is sent with the batch
leaves.py      arrays, tensors and long lists <-> bytes with a dtype, a shape and strides
layouts.py     which strides a batch keeps
limits.py      limits on tree and leaves, for sender and receiver
"""
