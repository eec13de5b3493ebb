"""How ranks divide the weights of a Large-DiT's blocks; accel/families/dit/division.py says what each name means."""

COLUMNS = "attention.wv", "feed_forward.w1", "feed_forward.w3"
ROWS = "attention.wo", "feed_forward.w2"
GATHERED = "attention.wq", "attention.wk", "adaLN_modulation.1"
PACKED = {}
HEADS = "attention.n_heads", "attention.n_kv_heads"
NORMS = "attention.q_norm", "attention.k_norm"
