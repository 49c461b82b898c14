"""The viewer: `turnwise view`, a local page that shows run folders."""
