"""Variables: by names and scopes, with initial values, cut over devices, merged over towers."""
