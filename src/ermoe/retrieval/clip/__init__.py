"""CLIP with an image tower that can be made sparse, out of open_clip's and timm's parts."""

from ermoe.errors import UserError

try:
    import open_clip  # noqa: F401
except ImportError as problem:
    raise UserError("retrieval needs open_clip: pip install 'ermoe[clip]'") from problem
