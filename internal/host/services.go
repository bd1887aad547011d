package host

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"capstan.dev/capstan/internal/atomicfile"
	"capstan.dev/capstan/internal/boottime"
	"capstan.dev/capstan/internal/host/admission"
	"capstan.dev/capstan/internal/host/hostpb"
	"capstan.dev/capstan/internal/host/network"
)

const (
	// servicesFile contains the last request of SetServices for a network.
	servicesFile = "services.json"
	// servicesPause is the time between two looks at the addresses of published Services.
	servicesPause = 5 * time.Second
)

// SetServices replaces the Services that this host publishes for a cluster.
func (ns *networks) SetServices(ctx context.Context, req *hostpb.SetServicesRequest) (*hostpb.SetServicesResponse, error) {
	ns.publishing.Lock()
	defer ns.publishing.Unlock()
	unrecorded, err := ns.recordServices(req)
	if err != nil {
		return nil, err
	}
	refused, err := ns.box.SetServices(ctx, req.NetworkId, boxServices(req))
	if err != nil {
		return nil, status.Errorf(codes.Internal, "services of network %s: %v", req.NetworkId, errors.Join(err, unrecorded))
	}
	if unrecorded != nil {
		return nil, status.Errorf(codes.Internal, "recording services: %v", unrecorded)
	}
	out := &hostpb.SetServicesResponse{}
	for _, place := range slices.SortedFunc(maps.Keys(refused), network.Place.Compare) {
		out.Refused = append(out.Refused, &hostpb.RefusedAddress{Address: place.Address.String(), Name: place.Name, Message: refused[place]})
	}
	ns.log.Info("Published Services", "cluster", req.Namespace+"/"+req.Name, "id", req.NetworkId, "services", len(req.Services), "refused", len(refused))
	return out, nil
}

// recordServices writes the request to disk. The lock of all objects is held only for this: addresses are probed later. A request
// that cannot be written, for example to a full disk, is in effect as long as capstand runs, and the caller tries again: a Service that
// was withdrawn must not stay.
func (ns *networks) recordServices(req *hostpb.SetServicesRequest) (unrecorded, refused error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	if err := admission.Services(req, ns.byID[req.GetNetworkId()]); err != nil {
		return nil, err
	}
	unrecorded = writeSpec(ns.store.path(networksDir, req.NetworkId, servicesFile), req)
	delete(ns.unrecorded, req.NetworkId)
	if unrecorded != nil {
		ns.unrecorded[req.NetworkId] = req
	}
	return unrecorded, nil
}

// ListServices returns the recorded Services of all networks. A record that cannot be read is left out: nothing of it is published.
func (h *Host) ListServices(context.Context, *hostpb.ListServicesRequest) (*hostpb.ListServicesResponse, error) {
	var all []*hostpb.SetServicesRequest
	for _, id := range h.networkIDs() {
		req, err := h.recordedServices(id)
		if err != nil {
			h.log.Error("Cannot read the record of published Services", "id", id, "error", err)
			continue
		}
		all = append(all, req)
	}
	return hostpb.ServiceLists(slices.Values(all)), nil
}

// boxServices converts a request that admission.Services has checked.
func boxServices(req *hostpb.SetServicesRequest) (out []network.Service) {
	for _, s := range req.Services {
		service := network.Service{Name: s.Name, Address: netip.MustParseAddr(s.Address), HostPorts: s.HostPorts}
		for _, p := range s.Ports {
			service.Ports = append(service.Ports, network.ServicePort{Protocol: strings.ToLower(p.Protocol.String()), Port: uint16(p.Port), NodePort: uint16(p.NodePort)})
		}
		for _, m := range s.Machines {
			service.Machines = append(service.Machines, netip.MustParseAddr(m))
		}
		for _, r := range s.SourceRanges {
			service.Sources = append(service.Sources, netip.MustParsePrefix(r))
		}
		out = append(out, service)
	}
	return out
}

// portsUnpublished returns an error if a Service has one of the addresses and ports, except those that a load balancer has already.
func (ns *networks) portsUnpublished(listen, have []string) error {
	for _, address := range listen {
		to, err := netip.ParseAddrPort(address)
		if err != nil || slices.Contains(have, address) {
			continue
		}
		published, err := ns.box.PortPublished(to)
		if err != nil {
			return err
		}
		if published {
			return fmt.Errorf("a Service is published at %s; choose another port, or remove the port from spec.services.hostPorts of the CapstanHost", address)
		}
	}
	return nil
}

// holdServices publishes the recorded Services at the start, and later again if an address is missing: another program
// removed it, or another station had it. It announces the addresses at times, because an announcement can be lost. Without a manager it
// does not, and gives up those that another station has: a host that was away must not take connections from its successor.
func (h *Host) holdServices(ctx context.Context) {
	ticker := time.NewTicker(servicesPause)
	defer ticker.Stop()
	for first := true; ctx.Err() == nil; first = false {
		h.holdServicesOnce(ctx, first)
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
}

// holdServicesOnce looks at the Services of all networks once. An error that lasts is logged once.
func (h *Host) holdServicesOnce(ctx context.Context, first bool) {
	known, managed := map[string]bool{}, h.pulses.managed(boottime.Now(), h.fence.Watched())
	for _, id := range h.networkIDs() {
		known[id] = true
		if err := h.holdServicesOf(ctx, id, first, managed); ctx.Err() == nil && h.serviceErrors.news(id, err) {
			h.log.Error("Cannot publish Services of a cluster; capstand tries again", "id", id, "error", err)
		}
	}
	h.serviceErrors.keep(known)
}

func (h *Host) networkIDs() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.networks.byID))
}

func (h *Host) holdServicesOf(ctx context.Context, id string, first, managed bool) error {
	h.publishing.Lock()
	defer h.publishing.Unlock()
	req, err := h.recordedServices(id)
	if err != nil || req == nil {
		return err
	}
	services, lost := boxServices(req), network.Refused(nil)
	if !managed { // A manager may have moved the addresses to another host.
		if services, lost, err = h.box.YieldServices(ctx, id, services); err != nil {
			return err
		}
	}
	whole, err := h.box.HoldsServices(id, services)
	if err == nil && managed {
		err = h.box.AnnounceServices(id, services)
	}
	if err != nil || whole && !first {
		return errors.Join(append(refusals(lost), err)...)
	}
	refused, err := h.box.SetServices(ctx, id, services)
	return errors.Join(slices.Concat(refusals(lost), refusals(refused), []error{err})...)
}

// refusals returns the reasons in the order of the places.
func refusals(refused network.Refused) (out []error) {
	for _, place := range slices.SortedFunc(maps.Keys(refused), network.Place.Compare) {
		out = append(out, fmt.Errorf("%s %s: %s", place.Address, place.Name, refused[place]))
	}
	return out
}

// recordedServices returns the last request for a network, or nil if there was none or if the network does not exist.
func (ns *networks) recordedServices(id string) (*hostpb.SetServicesRequest, error) {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	n := ns.byID[id]
	if n == nil {
		return nil, nil
	}
	if req := ns.unrecorded[id]; req != nil {
		return req, nil
	}
	req := &hostpb.SetServicesRequest{}
	if err := readSpec(ns.store.path(networksDir, id, servicesFile), req); err != nil {
		return nil, atomicfile.IgnoreMissing(err)
	}
	return req, admission.Services(req, n)
}
