"""What makes and keeps a run: its config, its checks, its folder, its state, how it stops."""
