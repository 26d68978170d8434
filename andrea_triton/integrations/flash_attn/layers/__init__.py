"""flash-attn's package of this name: the rotary embedding."""
