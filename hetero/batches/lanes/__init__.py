"""Samples of iterables, which lack an index. See `hetero.plans.lanes` for their order.

work.py      the samples of a batch, as places in lanes
pieces.py    what a request says about lanes, and what the answer says
source.py    the lanes of one data set in this process
iterator.py  the iterator of one lane
parts.py     how a source is divided into lanes
states.py    states of iterators as bytes

A batch stays a pure function: the sample at a place of a lane depends on source, seed, epoch, lane and place only. A
request also has a snapshot of the lane. So an endpoint without a live iterator need not begin at place 0.
"""
