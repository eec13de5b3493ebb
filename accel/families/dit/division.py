"""How ranks divide the weights of a DiT's blocks; names are of submodules of a block."""

COLUMNS = "attn.qkv", "mlp.fc1"  # a rank computes a part of the outputs
ROWS = "attn.proj", "mlp.fc2"  # a rank has a part of the inputs; the results are summed
GATHERED = ("adaLN_modulation.1",)  # as COLUMNS, and the outputs are gathered
PACKED = {"attn.qkv": 3}  # layers whose output is so many matrices of heads side by side
HEADS = ("attn.num_heads",)  # attributes that count them
NORMS = ()  # over all heads, of layers whose output is gathered
