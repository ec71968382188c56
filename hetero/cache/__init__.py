"""Keeps the first part of samples, for example decoded images, on the hosts that compute batches.

    loads -> fingerprint
          -> tiers -> store -> folders
          -> entries -> images

loads.py        calls the user's ``load(index)``, or takes what was kept
fingerprint.py  what the result of ``load`` depends on, as one digest
tiers.py        memory first, then a disk
store.py        the samples of one fingerprint in the files of one folder
folders.py      private folders of the files, which processes share and old ones leave
entries.py      one sample as bytes with a digest
images.py       images of Pillow
"""
