"""Checkpoints in a single file, in the names of their trainers: what one is, and its conversion to a folder. No torch.

`checkpoint_header.py` reads the header, `checkpoint.py` says by it what a file is, `unet_names.py` and `part_names.py`
which tensor of the file is which of a part, `part_configs.py` makes the parts' configurations of the shapes,
`transformer_file.py` says by the header which transformer a file has, `transformer_names.py` and
`transformer_configs.py` have its names and its configuration, and `transformer_plan.py` takes what the file lacks from
another folder. `tensor_copy.py` writes the weights, and `conversion.py` makes the folder, in a process of its own.
"""
