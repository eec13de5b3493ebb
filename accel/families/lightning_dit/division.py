"""How ranks divide the weights of a LightningDiT's blocks; accel/families/dit/division.py says what each name means."""

COLUMNS = "attn.qkv", "mlp.w12"
ROWS = "attn.proj", "mlp.w3"
GATHERED = ("adaLN_modulation.1",)
PACKED = {"attn.qkv": 3, "mlp.w12": 2}
HEADS = ("attn.num_heads",)
NORMS = ()
