package capstanhost

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/host/hostpb"
)

// maxDeviceKinds bounds the CDI devices in the status of a host.
const maxDeviceKinds = 64

// setDevices adds the CDI devices to the resources of a host. A kind is left out if its name is not valid for a resource.
func setDevices(s *infrav1.CapstanHostStatus, info *hostpb.HostInfo) {
	for i, k := range info.GetDevices() {
		if i >= maxDeviceKinds || len(validation.IsQualifiedName(k.GetName())) > 0 {
			continue
		}
		name := corev1.ResourceName(k.GetName())
		s.Capacity[name] = *resource.NewQuantity(int64(k.GetCount()), resource.DecimalSI)
		s.Allocatable[name] = *resource.NewQuantity(int64(max(0, k.GetCount()-k.GetAllocated())), resource.DecimalSI)
	}
}
