"""T1 scans of brains: finding them, judging them, and bringing them all onto one grid."""
