"""Asks endpoints for batches by index and delivers them in order. Runs in a rank.

    Reader         takes requests from the sampler and returns batches, in the thread of the training script
      Window       the order: which batches are missing, in progress, or waiting for their turn
      Fetchers     request the missing batches in threads of their own. The script's thread may request small batches
    Fleet          one per process, shared by its readers: follows the directory and prepares the endpoints
      Router       chooses the endpoint of a request
      Connection   one endpoint  ~~~ network ~~~>  the endpoint's process

The fleet's lock guards all these objects. `InlineFetches.lock` guards the fetches that the script's thread makes
itself.

reader.py          a rank's batches in order
window.py          the batches of one reader that are planned but not delivered yet
window_size.py     how many batches and bytes a window may have
fetchers.py        who requests a batch, and when
inline_fetches.py  the fetches that the script's thread makes itself
receiver_choice.py whether the script's thread should make fetches itself
outcomes.py        what the outcome of an attempt means for its batch and its endpoint
attempts.py        one batch in flight, what happens when an attempt fails, and whether the batch kills endpoints
hedging.py         when a batch is requested a second time
fleet.py           all endpoints as one reader process sees them
routing.py         the endpoints that the directory names, and which one gets the next request
consistency.py     whether the endpoints hold the same data set
connection.py      one endpoint, and what is known about it
"""
