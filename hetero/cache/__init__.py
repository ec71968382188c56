"""Keeps the first part of samples, for example decoded images, on the hosts that compute batches.

    loads -> fingerprint
          -> tiers -> store -> folders
          -> entries -> images

loads.py        calls the user's ``load(index)``, or takes its result from the cache
fingerprint.py  one digest of everything that the result of ``load`` depends on
tiers.py        memory first, then a disk
store.py        the samples of one fingerprint in the files of one folder
folders.py      private folders of the files: processes share them, and old folders are removed
entries.py      one sample as bytes with a digest
images.py       images of Pillow
"""
