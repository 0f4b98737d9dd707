"""What differs between vendors: their devices and drivers, their collective libraries, their number formats."""
