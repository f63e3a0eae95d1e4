"""The commands of `kvferry` but for the large ones: explain, demo and bench have rooms of their own."""
