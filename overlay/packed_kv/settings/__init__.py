"""Settings of an engine, checked: options and calibration."""
