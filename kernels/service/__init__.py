"""The compile service: what is built, when, by whom, and whether it is used."""
