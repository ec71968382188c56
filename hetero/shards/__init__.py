"""Map-style data sets over files of many rows: Parquet, tar, JSON Lines, Arrow, ArrayRecord, LitData and MDS.

rows.py       `Rows`, the data set: finds the block of a row, and keeps the blocks read last
index.py      `Index`, the file that `hetero index` writes: the rows and blocks of each shard
indexing.py   makes an index in several processes, and goes on after a kill
lengths.py    writes the lengths of rows
files.py      lists shards and reads bytes of them
formats/      one module for each format: what its blocks are, and how the rows of a block are read

A *shard* is a file. A *block* is the least part of a shard that is read at once: a row group of a Parquet file, a
record batch of an Arrow file, some lines, some samples of a tar file. A *row* is a sample before the user's functions.
"""

from hetero.shards.rows import Rows, array_record, arrow, jsonl, litdata, mds, parquet, tar

__all__ = ["Rows", "array_record", "arrow", "jsonl", "litdata", "mds", "parquet", "tar"]
