"""What concerns this process as a whole: its end, its garbage collector, its memory."""
