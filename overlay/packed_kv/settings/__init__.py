"""What an engine's configuration asks for, checked: options and calibration."""
