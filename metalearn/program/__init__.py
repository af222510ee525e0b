"""The program: from a checked config to ranks that train. The only room where metalearn and distributed meet."""
