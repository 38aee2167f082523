"""Brain age: from T1 scans to estimates with intervals, calibration and a report."""
