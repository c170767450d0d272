// What runs inside ns-3: nodes, links and messages from standard input, arrivals in us to standard output.
//
//   FRAME WINDOW (bytes)
//   NODES LINKS MESSAGES
//   a b GB/s us                            for each link, both directions
//   source target bytes lane n first ... n-th   for each message, which waits for n earlier ones
//
// Messages of a lane have the same ends and go one after the other, in the order in which they start. Every lane is a
// TCP connection, open before anything is sent, as queue pairs of RDMA are. TCP is a transport with a
// fixed window here: it neither starts slowly nor delays acknowledgements, and links hold packets back where queues are
// fair (FQ-CoDel above four packets, which drops none). GB/s are those of payload: headers come on top.

#include <cstdio>
#include <iostream>
#include <vector>

#include "ns3/core-module.h"
#include "ns3/data-rate.h"
#include "ns3/inet-socket-address.h"
#include "ns3/internet-stack-helper.h"
#include "ns3/ipv4-address-helper.h"
#include "ns3/ipv4-global-routing-helper.h"
#include "ns3/node-container.h"
#include "ns3/packet-sink.h"
#include "ns3/point-to-point-helper.h"
#include "ns3/tcp-socket-factory.h"

using namespace ns3;

struct Message {
  int lane;
  uint64_t bytes, arrived, left;
  int waits;
  std::vector<int> followers;
  double end;
};

struct Lane {
  int source = -1, target = -1;
  std::vector<int> order;  // messages that have started
  size_t sending = 0, receiving = 0;
  Ptr<Socket> socket;
};

static const unsigned HEADERS = 52, FRAMING = 2;  // of IP and TCP with its time stamps; of the link
static const int64_t OPEN_NS = 20000000;          // until all connections are open
static unsigned frame, window;
static std::vector<Message> messages;
static std::vector<Lane> lanes;
static std::vector<Ptr<Node>> nodes;
static std::vector<Ipv4Address> addresses;

static void start(int i);

static void received(int i, Ptr<const Packet> packet, const Address&) {
  Lane& lane = lanes[i];
  uint64_t bytes = packet->GetSize();
  while (bytes > 0 && lane.receiving < lane.order.size()) {
    Message& m = messages[lane.order[lane.receiving]];
    uint64_t taken = std::min(bytes, m.bytes - m.arrived);
    m.arrived += taken;
    bytes -= taken;
    if (m.arrived < m.bytes) return;
    m.end = (Simulator::Now().GetNanoSeconds() - OPEN_NS) / 1e3;
    ++lane.receiving;
    for (int f : m.followers)
      if (--messages[f].waits == 0) start(f);
  }
}

static void push(int i, Ptr<Socket>, uint32_t) {
  Lane& lane = lanes[i];
  for (; lane.sending < lane.order.size(); ++lane.sending) {
    Message& m = messages[lane.order[lane.sending]];
    while (m.left > 0) {
      uint32_t room = std::min<uint64_t>(m.left, lane.socket->GetTxAvailable());
      int sent = room ? lane.socket->Send(Create<Packet>(room)) : 0;
      if (sent <= 0) return;
      m.left -= sent;
    }
  }
}

static void start(int i) {
  lanes[messages[i].lane].order.push_back(i);
  push(messages[i].lane, nullptr, 0);
}

static void open(int i) {
  Lane& lane = lanes[i];
  lane.socket = Socket::CreateSocket(nodes[lane.source], TcpSocketFactory::GetTypeId());
  lane.socket->SetSendCallback(MakeBoundCallback(&push, i));
  lane.socket->Bind();
  lane.socket->Connect(InetSocketAddress(addresses[lane.target], 1000 + i));
}

static void settings() {
  Config::SetDefault("ns3::TcpSocket::SegmentSize", UintegerValue(frame - HEADERS));
  Config::SetDefault("ns3::TcpSocket::InitialCwnd", UintegerValue(window / frame));
  Config::SetDefault("ns3::TcpSocket::SndBufSize", UintegerValue(window));
  Config::SetDefault("ns3::TcpSocket::RcvBufSize", UintegerValue(window));
  Config::SetDefault("ns3::TcpSocket::DelAckCount", UintegerValue(1));
  Config::SetDefault("ns3::FqCoDelQueueDisc::MaxSize", StringValue("10000000p"));  // nothing is dropped
  Config::SetDefault("ns3::FqCoDelQueueDisc::Target", StringValue("100s"));
  Config::SetDefault("ns3::FqCoDelQueueDisc::Flows", UintegerValue(16384));  // and hardly two share a queue
}

static void link(int a, int b, double gbps, double us, int index) {
  PointToPointHelper helper;
  helper.SetDeviceAttribute("DataRate", DataRateValue(DataRate(uint64_t(gbps * 8e9 * (frame + FRAMING) / (frame - HEADERS)))));
  helper.SetDeviceAttribute("Mtu", UintegerValue(frame));
  helper.SetChannelAttribute("Delay", TimeValue(NanoSeconds(int64_t(us * 1e3))));
  helper.SetQueue("ns3::DropTailQueue<Packet>", "MaxSize", StringValue("4p"));
  NetDeviceContainer ends = helper.Install(nodes[a], nodes[b]);
  Ipv4AddressHelper range(Ipv4Address((10u << 24) + (index << 2)), Ipv4Mask("255.255.255.252"));
  Ipv4InterfaceContainer made = range.Assign(ends);
  addresses[a] = made.GetAddress(0);
  addresses[b] = made.GetAddress(1);
}

int main() {
  int hosts, links, count;
  std::cin >> frame >> window >> hosts >> links >> count;
  settings();
  NodeContainer all;
  all.Create(hosts);
  InternetStackHelper().Install(all);
  for (int i = 0; i < hosts; i++) nodes.push_back(all.Get(i));
  addresses.resize(hosts);
  for (int i = 0; i < links; i++) {
    int a, b;
    double gbps, us;
    std::cin >> a >> b >> gbps >> us;
    link(a, b, gbps, us, i);
  }
  messages.resize(count, {0, 0, 0, 0, 0, {}, -1.0});
  for (int i = 0; i < count; i++) {
    Message& m = messages[i];
    int source, target;
    std::cin >> source >> target >> m.bytes >> m.lane >> m.waits;
    m.left = m.bytes;
    if (m.lane >= int(lanes.size())) lanes.resize(m.lane + 1);
    lanes[m.lane].source = source;
    lanes[m.lane].target = target;
    for (int j = 0, first; j < m.waits; j++) {
      std::cin >> first;
      messages[first].followers.push_back(i);
    }
  }
  Ipv4GlobalRoutingHelper::PopulateRoutingTables();
  for (int i = 0; i < int(lanes.size()); i++) {
    Ptr<PacketSink> sink = CreateObject<PacketSink>();
    sink->SetAttribute("Protocol", TypeIdValue(TcpSocketFactory::GetTypeId()));
    sink->SetAttribute("Local", AddressValue(InetSocketAddress(Ipv4Address::GetAny(), 1000 + i)));
    sink->TraceConnectWithoutContext("Rx", MakeBoundCallback(&received, i));
    nodes[lanes[i].target]->AddApplication(sink);
    Simulator::Schedule(NanoSeconds(1), &open, i);
  }
  for (int i = 0; i < count; i++)
    if (messages[i].waits == 0) Simulator::Schedule(NanoSeconds(OPEN_NS), &start, i);
  Simulator::Run();
  for (const Message& m : messages) std::printf("%.4f\n", m.end);
}
