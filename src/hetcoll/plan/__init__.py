"""Plans: who sends what to whom, and when. Pure: nothing here knows an engine, a device or a network."""
