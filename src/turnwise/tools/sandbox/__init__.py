"""Python and shell for the model, in a sandbox: one interpreter process for each trajectory."""
