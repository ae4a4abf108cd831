"""For those who build a backend or something above one: what every backend has to pass, and stores that misbehave."""
