"""Model architectures: what a file says about its model (`config`, without torch), and one file per architecture."""
