"""Where DeepSpeed is known: its seams, and ZeRO-3 with our swappers inside."""
