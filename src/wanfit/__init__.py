"""WanFit: Wan 2.2 video models in the memory you have. Importing this package imports neither torch nor CUDA."""

__version__ = "0.1.0"
