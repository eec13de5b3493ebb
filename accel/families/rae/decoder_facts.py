"""Facts about RAE's published ViT decoders that no tensor contains. Imports no torch."""

HEADS_BY_WIDTH = {768: 12, 1024: 16, 1152: 16}
LAYER_NORM_EPS = 1e-12
# Mean and standard deviation of the pixels.
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
