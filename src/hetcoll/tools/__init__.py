"""What runs beside a job: the launcher, its watchdog, the doctor's checks."""
