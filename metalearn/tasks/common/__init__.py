"""The code that task sources share: it draws episodes and samples, reads files, and uses the cache."""
