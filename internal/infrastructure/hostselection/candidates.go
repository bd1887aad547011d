package hostselection

import (
	infrav1 "capstan.dev/capstan/api/infrastructure/v1beta2"
	"capstan.dev/capstan/internal/infrastructure/connections"
	"capstan.dev/capstan/internal/infrastructure/placement"
)

// IgnoresVLAN reports whether the capstand of a host would attach machines of a VLAN to the LAN without the VLAN, because it is older
// than VLANs. The answer is no without a VLAN (0), and for a host without a connection: it gets no request.
func IgnoresVLAN(conn *connections.Host, vlan int32) bool {
	return vlan != 0 && conn != nil && !conn.Info().GetVlans()
}

// Candidates describes hosts to placement, with the current state of their connections.
func Candidates(list []infrav1.CapstanHost, pool *connections.Pool) []placement.Host {
	out := make([]placement.Host, 0, len(list))
	for i := range list {
		h := &list[i]
		c := placement.Host{
			Name:          h.Name,
			FailureDomain: placement.FailureDomain(h),
			Box:           Box(h, pool),
			Tunnel:        h.Spec.TunnelAddress,
			Encrypted:     OverlayKey(h, pool) != "",
			ControlPlane:  placement.AllowsControlPlane(h),
			Taints:        h.Spec.Taints,
		}
		conn := pool.Get(h.Name)
		if c.Unavailable = unavailable(h, conn); c.Unavailable == "" {
			addCapacity(&c, conn)
		}
		out = append(out, c)
	}
	return out
}

// unavailable returns the reason why a host gets no new machines; "" if it can get some.
func unavailable(h *infrav1.CapstanHost, conn *connections.Host) string {
	switch {
	case !h.DeletionTimestamp.IsZero():
		return "is being deleted"
	case !placement.Schedulable(h):
		return "is unschedulable"
	case conn == nil:
		return "is not connected"
	case conn.ConnectionError() != nil:
		return "is not connected: " + conn.ConnectionError().Error()
	case conn.SilenceError() != nil:
		return "does not answer"
	}
	return ""
}

// addCapacity adds the abilities and the free capacity that a host reports.
func addCapacity(c *placement.Host, conn *connections.Host) {
	info, free := conn.Info(), conn.Free()
	c.Versions, c.Images = info.GetKubernetesVersions(), info.GetImages()
	for _, i := range info.GetMachineImages() {
		if i.GetProblem() != "" {
			c.BadImages = append(c.BadImages, i.GetName())
		}
	}
	c.Volumes, c.FreeVolumes = info.GetVolumes(), info.GetDiskBytes()-info.GetVolumeBytes()
	c.CPUs, c.Disk = info.GetCpus(), info.GetDiskBytes()
	c.FreeCPUs, c.FreeMemory, c.FreeDisk = free.CPUs, free.Memory, free.Disk
	c.LANs, c.VLANs, c.IPv6LANs = info.GetLans(), info.GetVlans(), info.GetIpv6Lans()
	c.HostAccess, c.FreeDevices = info.GetHostMounts(), free.Devices
}
