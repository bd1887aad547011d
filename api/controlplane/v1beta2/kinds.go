package v1beta2

// Kinds of this API group.
const (
	ControlPlaneKind         = "CapstanControlPlane"
	ControlPlaneTemplateKind = "CapstanControlPlaneTemplate"
)

// ControlPlaneGroupKind is the kind of control planes in every API version.
var ControlPlaneGroupKind = GroupVersion.WithKind(ControlPlaneKind).GroupKind()
