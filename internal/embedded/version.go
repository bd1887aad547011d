package embedded

// Version of Capstan, and of its providers in clusterctl's inventory. Set with -ldflags -X.
var Version = "v0.1.0"
