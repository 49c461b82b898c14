"""Processes, threads, deadlines and logs; imports none of the other rooms but config and errors."""
