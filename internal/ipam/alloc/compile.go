package alloc

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"go4.org/netipx"
	"k8s.io/apimachinery/pkg/util/validation/field"

	ipamv1 "capstan.dev/capstan/api/ipam/v1beta2"
)

// Compile returns the plan of a spec, or its errors. path is the path of the spec in its object.
func Compile(spec *ipamv1.CapstanIPPoolSpec, path *field.Path) (*Plan, field.ErrorList) {
	c := &compiler{spec: spec, plan: &Plan{
		Order:     spec.Order,
		reserved:  map[U128]ipamv1.Reservation{},
		byClaim:   map[claimName]U128{},
		anyClaims: map[string]U128{},
	}}
	if spec.RestSeconds != nil {
		c.plan.Rest = time.Duration(*spec.RestSeconds) * time.Second
	}
	subnets := path.Child("subnets")
	if len(spec.Subnets) == 0 {
		return nil, field.ErrorList{field.Required(subnets, "expected at least one subnet, found none: add a subnet with a cidr")}
	}
	var pool netipx.IPSetBuilder
	for i := range spec.Subnets {
		c.subnet(&spec.Subnets[i], subnets.Index(i), &pool)
	}
	if len(c.errs) > 0 {
		return nil, c.errs
	}
	c.prefixLength(path.Child("prefixLength"))
	set, err := pool.IPSet()
	if err != nil {
		c.errs = append(c.errs, field.Invalid(subnets, "", err.Error()))
	}
	if len(c.errs) > 0 {
		return nil, c.errs
	}
	c.plan.Pool = rangesOf(set).whole(c.plan.Bits)
	if len(c.plan.Pool) == 0 {
		c.errs = append(c.errs, field.Invalid(subnets, len(spec.Subnets),
			"the pool contains no address to allocate: extend the ranges, exclude less, or allow reserved addresses with allocateReserved"))
		return nil, c.errs
	}
	if c.plan.Total().IsZero() { // The number of 2^128 addresses overflows a U128.
		c.errs = append(c.errs, field.Invalid(subnets, len(spec.Subnets),
			"the pool contains every address of IPv6: use the networks of the machines"))
		return nil, c.errs
	}
	c.reservations(path.Child("reservations"))
	if len(c.errs) > 0 {
		return nil, c.errs
	}
	c.plan.index()
	return c.plan, nil
}

type compiler struct {
	spec  *ipamv1.CapstanIPPoolSpec
	plan  *Plan
	cidrs []netip.Prefix
	errs  field.ErrorList
}

func (c *compiler) invalid(path *field.Path, value any, format string, args ...any) {
	c.errs = append(c.errs, field.Invalid(path, value, fmt.Sprintf(format, args...)))
}

func (c *compiler) subnet(s *ipamv1.Subnet, path *field.Path, pool *netipx.IPSetBuilder) {
	cidr, err := ParseCIDR(s.CIDR)
	if err != nil {
		c.invalid(path.Child("cidr"), s.CIDR, "%v", err)
		return
	}
	if cidr.Bits() == 0 {
		c.invalid(path.Child("cidr"), s.CIDR, "cidr must not be /0: use the network of the machines")
		return
	}
	if !c.fits(cidr, path.Child("cidr")) {
		return
	}
	gateway, ok := c.gateway(s, cidr, path.Child("gateway"))
	if !ok {
		return
	}
	var own netipx.IPSetBuilder
	if c.ranges(s.Ranges, cidr, path.Child("ranges"), &own) == 0 {
		own.AddPrefix(cidr)
	}
	c.exclude(s.Exclude, cidr, path.Child("exclude"), &own)
	for _, kept := range c.keptBack(s, cidr, gateway) {
		own.Remove(kept)
	}
	set, err := own.IPSet()
	if err != nil {
		c.invalid(path, s.CIDR, "%v", err)
		return
	}
	pool.AddSet(set)
	span := netipx.RangeOfPrefix(cidr)
	entry := planSubnet{
		Range:   Range{FromAddr(span.From()), FromAddr(span.To())},
		length:  int32(cidr.Bits()),
		gateway: s.Gateway,
		drain:   s.Drain != nil && *s.Drain,
	}
	if gateway.IsValid() {
		entry.gateway = gateway.String()
	}
	c.plan.subnets = append(c.plan.subnets, entry)
}

// fits compares the subnet with the previous ones.
func (c *compiler) fits(cidr netip.Prefix, path *field.Path) bool {
	if len(c.cidrs) == 0 {
		c.plan.V6 = cidr.Addr().Is6()
	}
	if cidr.Addr().Is6() != c.plan.V6 {
		c.invalid(path, cidr.String(), "a pool has one address family: %s and %s mix IPv4 and IPv6; create one pool for each family", c.cidrs[0], cidr)
		return false
	}
	for _, other := range c.cidrs {
		if other.Overlaps(cidr) {
			c.invalid(path, cidr.String(), "overlaps subnet %s of the same pool: merge them or make them disjoint", other)
			return false
		}
	}
	c.cidrs = append(c.cidrs, cidr)
	return true
}

func (c *compiler) gateway(s *ipamv1.Subnet, cidr netip.Prefix, path *field.Path) (netip.Addr, bool) {
	if s.Gateway == "" {
		return netip.Addr{}, true
	}
	gateway, err := ParseAddr(s.Gateway)
	if err != nil {
		c.invalid(path, s.Gateway, "%v", err)
		return netip.Addr{}, false
	}
	if !cidr.Contains(gateway) {
		c.invalid(path, s.Gateway, "gateway must be inside %s", cidr)
		return netip.Addr{}, false
	}
	return gateway, true
}

func (c *compiler) ranges(list []ipamv1.AddressRange, cidr netip.Prefix, path *field.Path, own *netipx.IPSetBuilder) int {
	var seen []netipx.IPRange
	for i, s := range list {
		r, ok := c.inside(string(s), cidr, path.Index(i))
		if !ok {
			continue
		}
		for j, other := range seen {
			if other.Overlaps(r) {
				c.invalid(path.Index(i), s, "overlaps or repeats %s (%s): every address may be in one range only", path.Index(j), other)
				break
			}
		}
		seen = append(seen, r)
		own.AddRange(r)
	}
	return len(list)
}

func (c *compiler) exclude(list []ipamv1.AddressRange, cidr netip.Prefix, path *field.Path, own *netipx.IPSetBuilder) {
	for i, s := range list {
		if r, ok := c.inside(string(s), cidr, path.Index(i)); ok {
			own.RemoveRange(r)
		}
	}
}

func (c *compiler) inside(s string, cidr netip.Prefix, path *field.Path) (netipx.IPRange, bool) {
	r, err := parseRange(s)
	switch {
	case err != nil:
		c.invalid(path, s, "%v", err)
	case r.From().Is4() != cidr.Addr().Is4():
		c.invalid(path, s, "is of another address family than %s", cidr)
	case !cidr.Contains(r.From()) || !cidr.Contains(r.To()):
		c.invalid(path, s, "must be inside %s", cidr)
	default:
		return r, true
	}
	return netipx.IPRange{}, false
}

// keptBack returns the addresses of a subnet that no claim gets, because allocateReserved does not name them.
func (c *compiler) keptBack(s *ipamv1.Subnet, cidr netip.Prefix, gateway netip.Addr) []netip.Addr {
	allowed := map[ipamv1.ReservedAddress]bool{}
	for _, a := range s.AllocateReserved {
		allowed[a] = true
	}
	var kept []netip.Addr
	if gateway.IsValid() && !allowed[ipamv1.GatewayAddress] {
		kept = append(kept, gateway)
	}
	// RFC 3021 and RFC 6164: both addresses of a point-to-point link can be used. Each block of a pool of prefixes is a
	// network, so its first address cannot be used.
	if c.spec.PrefixLength != nil || cidr.Bits() >= cidr.Addr().BitLen()-1 {
		return kept
	}
	if !c.plan.V6 && !allowed[ipamv1.BroadcastAddress] {
		kept = append(kept, netipx.RangeOfPrefix(cidr).To())
	}
	first := ipamv1.NetworkAddress
	if c.plan.V6 {
		first = ipamv1.AnycastAddress
	}
	if !allowed[first] {
		kept = append(kept, cidr.Addr())
	}
	return kept
}

func (c *compiler) prefixLength(path *field.Path) {
	if c.spec.PrefixLength == nil {
		return
	}
	length, width := int(*c.spec.PrefixLength), c.cidrs[0].Addr().BitLen()
	if length < 1 || length > width {
		c.invalid(path, length, "expected 1 to %d bits", width)
		return
	}
	for _, cidr := range c.cidrs {
		if cidr.Bits() > length {
			c.invalid(path, length, "a prefix of %d bits is larger than subnet %s: expected at least %d", length, cidr, cidr.Bits())
			return
		}
	}
	c.plan.prefixes = true
	c.plan.length = int32(length)
	c.plan.Bits = uint(width - length)
}

func (c *compiler) reservations(path *field.Path) {
	for i, r := range c.spec.Reservations {
		at := path.Index(i)
		addr, err := c.plan.Ask(r.Address)
		if err != nil {
			c.invalid(at.Child("address"), r.Address, "%v", err)
			continue
		}
		if other, taken := c.plan.reserved[addr]; taken {
			c.invalid(at.Child("address"), r.Address, "is already reserved for claim %q: an address can be kept for one claim only", other.Claim)
			continue
		}
		name := claimName{r.Namespace, r.Claim}
		if other, taken := c.plan.byClaim[name]; taken {
			c.invalid(at.Child("claim"), r.Claim, "already has %s reserved: a claim gets one address only", c.plan.Addr(other))
			continue
		}
		c.plan.reserved[addr] = r
		c.plan.byClaim[name] = addr
		if r.Namespace == "" {
			c.plan.anyClaims[r.Claim] = addr
		}
	}
}

// asked is a requested address, with the length of its prefix if the request contains one.
type asked struct {
	addr   netip.Addr
	length int
}

// Addr is the requested address.
func (a asked) Addr() netip.Addr { return a.addr }

func parseAsked(s string) (asked, error) {
	if strings.Contains(s, "/") {
		p, err := ParseCIDR(s)
		if err != nil {
			return asked{}, err
		}
		return asked{p.Addr(), p.Bits()}, nil
	}
	a, err := ParseAddr(s)
	return asked{a, -1}, err
}

func (p *Plan) checkAsked(s string, a asked) error {
	family := "IPv4"
	if p.V6 {
		family = "IPv6"
	}
	if a.addr.Is6() != p.V6 {
		return fmt.Errorf("%q is of another address family than the pool, which has %s", s, family)
	}
	first := FromAddr(a.addr)
	block := Range{first, first.Add(p.Block().Sub(One))}
	switch {
	case a.length >= 0 && p.prefixes && a.length != int(p.length):
		return fmt.Errorf("%q has length %d, but the pool allocates prefixes of length %d", s, a.length, p.length)
	case a.length >= 0 && !p.prefixes:
		return fmt.Errorf("%q is a prefix, but the pool allocates single addresses: omit the length", s)
	case !p.Aligned(first):
		return fmt.Errorf("%q is not the first address of a prefix of length %d", s, p.length)
	case !p.Contains(block):
		return fmt.Errorf("%q is not in the pool: choose an address inside its ranges that is not excluded or reserved", s)
	}
	return nil
}
