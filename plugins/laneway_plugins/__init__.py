"""The operations and loaders that come with Laneway."""
