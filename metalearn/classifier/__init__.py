"""A classifier of one's own pictures: features of a pretrained network that stays as it is, and a head that learns."""
