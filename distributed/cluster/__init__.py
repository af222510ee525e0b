"""The processes of a world: how they are launched, meet, notice losses, leave, and come from outside; on Ray too."""
