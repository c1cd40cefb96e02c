"""The trainer's side: a trio-native client and a blocking facade."""
