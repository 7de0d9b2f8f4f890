"""The disk store: pages in preallocated segment files, found through an index in RAM and a journal behind it."""
