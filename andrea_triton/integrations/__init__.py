"""Other libraries' ways in, through their public hooks and names: nothing happens on import.

transformers: a model by its name, attn_implementation="andrea_triton"; register() also lets every model that is asked for it be
              checked, which transformers does for its own names only.
sdpa:         someone else's model, whose calls of torch's scaled_dot_product_attention are to come here.
flash_attn:   code written for flash-attn, by changing one import.
"""
