"""Search over configs: the space, the study, samplers, trial slots and reports. Imports neither torch nor metalearn."""
