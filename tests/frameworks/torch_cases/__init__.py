"""What the tests of `hetcoll.torch` run on every rank. These modules import torch; the tests themselves do not."""
