"""The order of a user's sampler, and warnings about mistakes in it.

sampler.py         the order of a user's sampler, drawn batch by batch without changing the script's generators
made_anew.py       a warning about loaders that the script makes in each epoch
own_generators.py  the random generators that a sampler draws from in one pass
ranks.py           comparison with other ranks: seeds, and parts that samplers give to ranks
"""
